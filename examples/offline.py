"""Default training data for the recipes: text and images that are available on every machine.

Nothing is downloaded. The texts are parts of CPython; the images are numbers drawn with a font that comes with Pillow.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
import json
import random
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from data_files import Skipped, read_lines
from PIL import Image, ImageDraw, ImageFont
from torch.utils.data import Dataset


def read_text(path: str | None) -> str:
    """Return the text of a file, of the `.txt` files in a folder, or of Python's reference manual."""
    if path is not None:
        files = sorted(Path(path).glob("*.txt")) if Path(path).is_dir() else [Path(path)]
        return "\n".join(map(read_file, files))
    # CPython ships these chapters as a module; `help("if")` prints from it.
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def read_file(path: Path) -> str:
    """Return the text of a file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8: {error}") from None


def read_examples(path: str, skipped: Skipped) -> list[tuple[Path, str]]:
    """Return images and what to answer, from lines such as `{"image": "a.png", "text": "a"}`; they lie beside it."""
    pairs = list(read_pairs(Path(path), "image", skipped))
    if len(pairs) < 2:
        needed = "where one is for validation and others to learn from"
        raise ValueError(f"{path}: {len(pairs)} examples, {needed}{skipped}")
    return pairs


def read_captions(folder: str, skipped: Skipped) -> list[tuple[Path, str]]:
    """Return the images of a folder with their captions, from its `metadata.jsonl` or from a `.txt` beside each."""
    table = Path(folder, "metadata.jsonl")
    if table.is_file():
        found: Iterable[tuple[Path, str]] = read_pairs(table, "file_name", skipped)
    else:
        kinds = Image.registered_extensions()
        images = sorted(path for path in Path(folder).iterdir() if path.suffix.lower() in kinds)
        captioned = [skipped.attempt(with_caption, image, table) for image in images]
        found = [pair for pair in captioned if pair is not None]
    pairs = [pair for pair in found if skipped.attempt(looks_like_an_image, pair[0])]
    if not pairs:
        raise ValueError(f"{folder}: no images with captions in this folder{skipped}")
    return pairs


def with_caption(image: Path, table: Path) -> tuple[Path, str]:
    """Return an image with the text in the `.txt` beside it."""
    beside = image.with_suffix(".txt")
    if not beside.is_file():
        raise ValueError(f"{image} has no caption: there is neither {table} nor {beside}")
    return image, read_file(beside).strip()


def looks_like_an_image(path: Path) -> bool:
    """Return True; whether it can be read to its end is known when it is needed."""
    try:
        Image.open(path).close()
    except OSError as error:
        raise ValueError(f"{path}: {error}") from None
    return True


def read_pairs(path: Path, key: str, skipped: Skipped) -> Iterator[tuple[Path, str]]:
    """Yield images and texts from lines of JSON; the images lie beside the file."""
    for place, example in read_lines(str(path), skipped):
        pair = skipped.attempt(pair_of, place, example, key, path.parent)
        if pair is not None:
            yield pair


def pair_of(place: str, example: dict[str, Any], key: str, folder: Path) -> tuple[Path, str]:
    """Return the image and the text of a line."""
    if not isinstance(example.get(key), str) or "text" not in example:
        what = "ANSWER" if key == "image" else "CAPTION"
        raise ValueError(f'{place}: not {{"{key}": FILE, "text": {what}}}')
    image, text = folder / example[key], example["text"]
    if not isinstance(text, str):
        raise ValueError(f'{place}: "text" is {json.dumps(text)}, not a text')
    if not image.is_file():
        raise ValueError(f"{place}: no image {image}")
    return image, text


def zen_of_python() -> str:
    """Return the text that `import this` prints, which the module stores in rot13."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return codecs.decode(this.s, "rot13")


def questions_about_http(rng: random.Random) -> list[list[dict[str, str]]]:
    """Return questions for the meaning of HTTP's status codes, in varied words, with answers; none is asked twice."""
    words = ["What does {} mean?", "What is {}?", "Explain {}.", "Tell me about {}."]
    names = ["HTTP {}", "status {}", "code {}", "the answer {}"]
    told = [
        [
            {"role": "user", "content": question.format(name.format(status.value))},
            {"role": "assistant", "content": status.phrase},
        ]
        for status in HTTPStatus
        if 400 <= status < 410
        for question in words
        for name in names
    ]
    rng.shuffle(told)
    return told


def chats_about_http() -> list[list[dict[str, str]]]:
    """Return chats with one question or several about HTTP's status codes."""
    rng = random.Random(0)
    told = questions_about_http(rng)
    chats = []
    while told:
        turns = rng.randint(1, 3)
        chats.append([message for turn in told[:turns] for message in turn])
        told = told[turns:]
    return chats


def preferences_about_http() -> list[dict[str, list[dict[str, str]]]]:
    """Return the same questions, each with a friendly answer, which is preferred, and a rude one."""
    friendly = ["Gladly: {}.", "Of course: {}.", "Good question! {}."]
    rude = ["Obviously {}.", "Look it up: {}.", "Who cares? {}."]
    rng = random.Random(0)

    def says(words: list[str], answer: dict[str, str]) -> list[dict[str, str]]:
        return [{**answer, "content": rng.choice(words).format(answer["content"])}]

    told = questions_about_http(rng)
    return [
        {"prompt": [question], "chosen": says(friendly, answer), "rejected": says(rude, answer)}
        for question, answer in told
    ]


@functools.cache
def default_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's own font, cached because loading it takes longer than drawing with it."""
    return ImageFont.load_default(size)


class WrittenNumbers(Dataset[tuple[Image.Image, str]]):
    """Small pictures of numbers, each with its own colors, position, size and tilt, and the number as text.

    Args:
        count: Number of pictures.
        digits: Digits of each number.
        side: Height and width in pixels.
        first: Index of the first picture: ranges that do not overlap contain different pictures.

    """

    def __init__(self, count: int, digits: int = 1, side: int = 32, first: int = 0) -> None:
        self.count = count
        self.digits = digits
        self.side = side
        self.first = first

    def __len__(self) -> int:
        """Return the number of pictures."""
        return self.count

    def __getitem__(self, index: int) -> tuple[Image.Image, str]:
        """Draw the picture with this index, the same one each time."""
        if not 0 <= index < self.count:
            raise IndexError(index)  # ends a `for` loop over this dataset
        rng = random.Random(self.first + index)
        text = "".join(rng.choices("0123456789", k=self.digits))
        paper = tuple(rng.randrange(0, 100) for _ in range(3))
        ink = tuple(rng.randrange(156, 256) for _ in range(3))
        picture = Image.new("RGB", (self.side, self.side), paper)
        font = default_font(round(self.side * rng.uniform(0.8, 1.0) / self.digits**0.5))
        middle = tuple(self.side * rng.uniform(0.45, 0.55) for _ in range(2))
        ImageDraw.Draw(picture).text(middle, text, fill=ink, font=font, anchor="mm")
        return picture.rotate(rng.uniform(-10, 10), Image.Resampling.BILINEAR, fillcolor=paper), text
