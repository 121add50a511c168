"""The words of texts for users: README, docs, CHANGELOG, public docstrings, errors, warnings and the command line.

Code is free of them: names between backticks, options, and what developers read (docs/architecture.md, tests/).
"""

from __future__ import annotations

AVOIDED = {
    r"hosts?": "CPU memory (RAM), or CPU",
    r"device memory|memory of the device": "GPU memory",
    r"page-?lock\w*": "pinned",
    r"members?|segments?": "layer, block, unit",
    r"(is|are|be|was|were|been|being|not) stepped|steps (it|them|units|weights) (on|in|there)": "the optimizer updates",
    r"visits?|visited|visiting": "updated on the GPU",
    r"lives?|lived": "stays on the GPU",
    r"goes home|go home|went home": "is copied back to CPU memory",
    r"masters": "FP32 master weights",
    r"in words|(is|are|was|were) told": "raises an error that explains why",
    r"given back|gives? back|gave back": "restored, returned, freed",
    r"mend(s|ed|ing)?": "fixed",
    r"anew": "again",
    r"as ever": "as before",
    r"so many|as many as (it|there)": "a number",
    r"of one's own|of a user's own": "your own",
    r"whoever|nobody|somebody": "name the subject",
    r"for a night|over night|at night": "long runs, resumable",
    r"could be had": "was available",
    r"lies (on|in|there)|lie (on|in|there)": "is on, is in",
}
"""Words that are not written (whole words, in any case), and words to write in their place."""

WITHOUT_SUBJECT = r"Whoever|Who|Whatever|What|Nobody|Somebody|Of (?!\d)"
"""Beginnings of sentences whose subject is a clause, or comes late. Questions and headings may have them."""
