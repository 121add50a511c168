"""`sp-lightning check --config run.yaml`: does a program of the user's train with the numbers of plain training?

The program is a LightningModule with its data, named as for `sp-lightning fit`. A few steps of it are trained plainly,
twice, and then streamed in every way there is (`ways.py`). What a run shows is written down as it trains
(`observer.py`); the first loss, gradient or weight that differs is named (`compare.py`).
"""
