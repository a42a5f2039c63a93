"""Benchmarks: sinks beside their do-nothing twins, on one machine, in one run.

A table of cases (`cases`), what each run cost by kind of process (`measure`), and the run itself
(`run`). Figures of two runs on a shared machine are not comparable; the ratios inside one are.
"""
