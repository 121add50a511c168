"""`sp-lightning check --config run.yaml`: does a program of the user's train with the numbers of plain training?

The program is a LightningModule with its data, named as for `sp-lightning fit`. A few steps of it are trained plainly,
twice, and then streamed in every way there is (`ways.py`). An observer writes down the numbers of a run as it trains
(`observer.py`). A comparison names the first loss, gradient or weight that differs (`compare.py`).
"""
