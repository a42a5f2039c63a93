"""Hours of streams under random faults: nothing lost, and nothing that grows.

    .venv/bin/python -m tests.soak                                    # two hours
    .venv/bin/python -m tests.soak --minutes 10 --out ~/soak.json     # for trying
    .venv/bin/python -m tests.soak --page                             # its part of docs/clusters.md

`place` has brokers and a host for Spark, `driver` is the Spark driver, `faults` draws and applies
what goes wrong, `feed` writes the sources, `stored` reads the topics by the official Java client,
`flat` looks at memory, threads and files, `judged` holds all of it against the promises.
"""
