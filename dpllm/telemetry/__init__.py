"""What those who run jobs can watch: Prometheus metrics, a scrape endpoint, experiment trackers.

Comes in: public values, and values that were released with noise and accounted. Goes out: text in Prometheus' exposition
format, and calls of trackers. Must not know a row, a canary or a gradient; un-noised figures of the training enter where
``telemetry.private_metrics`` asks for them, and nowhere else. A failure here never ends a training run.
"""
