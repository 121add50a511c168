"""A recording in numbers, as a page in a real browser, and as a trace."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from sp_lightning import timeline
from sp_lightning.pipeline import Kind, Lane, Recording, Span
from sp_lightning.timeline import break_down, write_timeline

NODE = shutil.which("node")
CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)


def span(kind: Kind, begin: float, end: float, name: str = "blocks.0", nbytes: int = 0) -> Span:
    return Span(kind.lane, kind, name, begin, end, nbytes)


def make_recording(
    units: int = 8,
    steps: int = 1,
    load: float = 1e-3,
    gradients: float = 1e-3,
    step: float = 1e-3,
    visit: float = 0.0,
) -> Recording:
    """Steps that were never taken, of a chain of equal units; seconds for each unit. If visits take any, all visit."""
    k, nbytes = 2, 64 << 20
    free = dict.fromkeys(Lane, 0.0)
    spans: list[Span] = []
    moments = []

    def run(kind: Kind, name: str, seconds: float, ready: float = 0.0, nbytes: int = 0) -> float:
        if seconds:
            begin = max(free[kind.lane], ready)
            free[kind.lane] = begin + seconds
            spans.append(Span(kind.lane, kind, name, begin, begin + seconds, nbytes))
        return free[kind.lane]

    stepped = [0.0] * units
    left = [0.0]  # when each slot was given up
    for _ in range(steps):
        order = [(Kind.FORWARD, unit) for unit in range(units)]
        order += [(Kind.BACKWARD, unit) for unit in reversed(range(units))]
        moments.append(free[Lane.COMPUTE])
        for place, (kind, unit) in enumerate(order):
            name = f"model.layers.{unit}"
            if not units <= place < units + k:  # the last ones stay for the turn
                slot = left[-k] if len(left) >= k else 0.0
                arrived = run(Kind.LOAD, name, load, max(slot, stepped[unit] if place < units else 0.0), nbytes)
                if arrived > free[Lane.COMPUTE]:
                    run(Kind.STALL, "weights", arrived - free[Lane.COMPUTE])
            run(kind, name, 2e-3 if kind is Kind.FORWARD else 4e-3)
            left.append(free[Lane.COMPUTE])
            if kind is Kind.BACKWARD:
                landed = run(Kind.GRADIENTS, name, gradients, free[Lane.COMPUTE], nbytes)
                if visit:
                    up = run(Kind.STATE_UP, name, load, free[Lane.COMPUTE], nbytes)
                    stepped[unit] = run(Kind.VISIT, name, visit, up, 2 * nbytes)
                    run(Kind.STATE_DOWN, name, gradients, stepped[unit], nbytes)
                else:
                    stepped[unit] = run(Kind.STEP, name, step, landed, nbytes)
    moments.append(free[Lane.COMPUTE])
    return Recording(sorted(spans, key=lambda span: span.begin), list(zip(moments[:-1], moments[1:], strict=True)))


def test_a_recording_in_numbers():
    """By hand: a stall inside of a forward is no computing, work outside of the steps does not count."""
    numbers = break_down(
        Recording(
            [
                span(Kind.LOAD, -1.0, 1.0, nbytes=2000),
                span(Kind.FORWARD, 0.0, 4.0),
                span(Kind.STALL, 1.0, 2.0, "weights"),
                span(Kind.BACKWARD, 4.0, 8.0),
                span(Kind.GRADIENTS, 7.0, 9.0, nbytes=300),
                span(Kind.STALL, 8.0, 9.0, "gradients"),
                span(Kind.STATE_UP, 8.0, 9.0, nbytes=500),
                span(Kind.VISIT, 9.0, 9.5, nbytes=900),
                span(Kind.STEP, 9.0, 12.0),
                span(Kind.STATE_DOWN, 9.5, 10.0, nbytes=400),
            ],
            [(0.0, 10.0)],
        )
    )
    assert numbers.seconds == 10
    assert numbers.busy == dict(zip(Lane, [7, 2, 2.5, 0.5, 1, 0, 0], strict=True))
    assert numbers.nbytes == dict(zip(Lane, [0, 2500, 700, 900, 0, 0, 0], strict=True))
    assert numbers.stalled == 2
    assert numbers.stalls == {"weights": 1, "gradients": 1}
    assert numbers.elsewhere == 1
    assert numbers.overlap == 2 / 4
    assert numbers.rate(Lane.TO_HOST) == 280


@pytest.mark.parametrize(
    ("machine", "lane", "words"),
    [
        ({}, Lane.COMPUTE, "compute 95% of the time, and wait 5% for weights. Computing is the bottleneck."),
        ({"load": 5e-3}, Lane.TO_DEVICE, "for weights. The bottleneck is copying from CPU memory to the GPU, busy"),
        ({"step": 7e-3}, Lane.HOST, "for weights. The bottleneck is work on the CPU"),
        ({"gradients": 7e-3}, Lane.TO_HOST, "The bottleneck is copying from the GPU to CPU memory"),
        ({"visit": 7e-3}, Lane.VISIT, "The bottleneck is optimizer updates on the GPU"),
    ],
    ids=["compute", "to device", "host", "to host", "visits"],
)
def test_the_bottleneck_of_a_recorded_step(machine, lane, words):
    """Also where computing waits for weights that wait for an optimizer that waits for gradients."""
    numbers = break_down(make_recording(steps=4, **machine))
    assert numbers.bottleneck is lane
    assert words in numbers.headline()


def test_a_step_of_mostly_idle_time_has_no_bottleneck():
    recording = make_recording()
    begin, end = recording.steps[0]
    recording.steps[0] = begin, end + 0.5 * (end - begin)
    numbers = break_down(recording)
    assert numbers.bottleneck is None
    assert "In 33% of the time no layer computes" in numbers.headline()


def test_a_page_that_needs_nothing(tmp_path):
    """One file: no address to load anything from, and nothing in it ends its script."""
    write_timeline(make_recording(), tmp_path / "a.html", caption="it's a </script> of @data@ & more")
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert text.count("@data@") == 1
    assert text.count("</script>") == 1
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}


def test_a_chrome_trace(tmp_path):
    recording = make_recording(steps=2, load=5e-3)
    write_timeline(recording, tmp_path / "a.json", caption="mine")
    events = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(names.values()) == sorted(lane.value for lane in Lane)
    complete = [event for event in events if event["ph"] == "X"]
    work = {(names[e["tid"]], e["cat"], e["ts"], e["dur"]) for e in complete if e["tid"] in names}
    assert work == {(s.lane.value, s.kind.label, s.begin * 1e6, (s.end - s.begin) * 1e6) for s in recording.spans}
    assert [event["name"] for event in complete if event["tid"] not in names] == ["step 1", "step 2"]


SCRIPT = """
<pre id="report"></pre><script>{
const report = {};
const bar = words => [...document.querySelectorAll("g[data-tip]")].find(g => g.dataset.tip.startsWith(words));
const shown = () => [...document.querySelectorAll("g[data-tip]")].filter(g => g.style.display !== "none");
report.all = shown().length;
report.lanes = [...svg.querySelectorAll("text[font-size='14']")].map(text => text.textContent);
const first = bar("forward: model.layers.0"), drawn = first.querySelector("rect");
const before = drawn.getBoundingClientRect();
const mouse = (type, where, more) => where.dispatchEvent(new (type === "wheel" ? WheelEvent : PointerEvent)(
  type, {bubbles: true, cancelable: true, clientX: before.x + 1, clientY: before.y + 4, ...more}));
mouse("pointermove", first);
report.tip = [getComputedStyle(tip).display, tip.textContent];
mouse("wheel", first, {deltaY: -1000});
report.wider = [plot.seconds / (end - begin), drawn.getBoundingClientRect().width / before.width];
report.inView = shown().length;
report.label = first.querySelector("text").textContent;
const ticksZoomed = [...ticks.children].map(mark => mark.textContent);
report.ticks = ticksZoomed.length > 3 && new Set(ticksZoomed).size === ticksZoomed.length;
const at = [begin, end];
mouse("pointerdown", svg, {clientX: 600}); mouse("pointermove", svg, {clientX: 500}); mouse("pointerup", svg);
report.moved = begin > at[0] && Math.abs((end - begin) - (at[1] - at[0])) < 1e-12;
mouse("dblclick", svg);
report.again = drawn.getBoundingClientRect().width / before.width;
report.back = shown().length;
report.page = getComputedStyle(document.body).backgroundColor;
document.getElementById("report").textContent = JSON.stringify(report);
}</script></body>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome is installed")
@pytest.mark.parametrize(
    ("dark", "machine", "lanes", "label"),
    [
        (False, {}, ["compute", "CPU to GPU", "GPU to CPU", "CPU"], "layers.0"),
        (True, {"visit": 1e-3}, ["compute", "CPU to GPU", "GPU to CPU", "GPU updates"], "0"),
    ],
    ids=["light", "dark, visits"],
)
def test_the_page_in_a_browser(tmp_path, dark, machine, lanes, label):
    """It has a row for each lane that works; a wheel zooms, a drag moves, a double-click goes back, pointing tells."""
    page = tmp_path / "timeline.html"
    recording = make_recording(units=12, steps=2, load=5e-3, **machine)
    write_timeline(recording, page)
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", SCRIPT, 1), encoding="utf-8")
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--window-size=1400,700",
        f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    ]  # fmt: skip
    done = subprocess.run([CHROMIUM, *flags, "--dump-dom", page.as_uri()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r'<pre id="report">(.+)</pre>', done.stdout)
    assert found is not None, done.stderr
    report = json.loads(unescape(found[1]))
    assert report["all"] == report["back"] == len(drawn(recording))
    assert report["lanes"] == lanes
    assert report["tip"][0] == "block"
    assert report["tip"][1].startswith("forward: model.layers.0\n2.00 ms, from 5.00 ms to 7.00 ms")
    assert report["wider"] == pytest.approx([math.exp(2)] * 2, rel=0.1)
    assert 0 < report["inView"] < report["all"] / 2
    assert report["label"] == label, "as much of the name as there is room for"
    assert report["ticks"]
    assert report["moved"]
    assert report["again"] == pytest.approx(1, abs=1e-3)
    assert report["page"] == ("rgb(15, 20, 25)" if dark else "rgb(255, 255, 255)")


def drawn(recording: Recording) -> list[Span]:
    """What a picture shows, in its order: what is inside of the steps, and stalls on top."""
    inside = [span for span in recording.spans if span.begin < recording.steps[-1][1]]
    return sorted(inside, key=lambda span: (span.kind is Kind.STALL, span.begin, -span.end))


def pieces(calls: list[dict[str, object]]) -> list[list[object]]:
    """The bars of calls, as the page's own code cuts them."""
    page = (Path(timeline.__file__).parent / "page.html").read_text(encoding="utf-8")
    code = page[page.index("function cutAtInnerCalls") : page.index("const computes =")]
    asks = f"{code}; console.log(JSON.stringify(cutAtInnerCalls({json.dumps(calls)})))"
    done = subprocess.run([str(NODE), "-e", asks], capture_output=True, text=True, check=True)
    return [[piece["name"], piece["begin"], piece["end"]] for piece in json.loads(done.stdout)]


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_a_unit_that_calls_others_is_drawn_around_them() -> None:
    """It has a bar before, between and after them, at any depth; other bars are whole."""
    outer = {"name": "outer", "begin": 0, "end": 10}
    inner = [{"name": "a", "begin": 2, "end": 4}, {"name": "b", "begin": 4, "end": 8}]
    deep = {"name": "c", "begin": 5, "end": 6}
    found = pieces([outer, *inner, deep, {"name": "next", "begin": 10, "end": 12}])
    assert sorted(found, key=lambda piece: piece[1]) == [
        ["outer", 0, 2], ["a", 2, 4], ["b", 4, 5], ["c", 5, 6], ["b", 6, 8], ["outer", 8, 10], ["next", 10, 12]
    ]  # fmt: skip


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.label)
def test_the_page_knows_all_kinds(kind: Kind) -> None:
    """Else a span has no color, and is called undefined."""
    page = (Path(timeline.__file__).parent / "page.html").read_text(encoding="utf-8")
    assert f'"{kind.label}": ' in page
    assert f"--{kind.label.replace(' ', '-')}: " in page
