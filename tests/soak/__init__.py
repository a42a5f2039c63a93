"""Hours of streams under random faults: no row is lost, and nothing grows.

    .venv/bin/python -m tests.soak                                    # two hours
    .venv/bin/python -m tests.soak --minutes 10 --out ~/soak.json     # to try it
    .venv/bin/python -m tests.soak --page                             # its part of docs/clusters.md

`place` has the brokers and a host for Spark, `driver` is the Spark driver, `faults` draws and
applies the faults, `feed` writes the sources, `stored` reads the topics by the official Java
client, `flat` watches memory, threads and files, `run` plays it all and judges it by the promises.
"""
