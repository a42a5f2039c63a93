"""A standalone Spark cluster on hosts: which promises hold when executors and hosts die.

    .venv/bin/python -m tests.hosts.standalone                    # all cases, half an hour
    .venv/bin/python -m tests.hosts.standalone --only worker_host
    .venv/bin/python -m tests.hosts.standalone --short            # the form for CI
    .venv/bin/python -m tests.hosts.standalone --page             # its part of docs/clusters.md

`place` has a master, two workers, two drivers' hosts, a name server and two brokers, each on a host
of its own. Sources, checkpoints and, but for one case, ledgers are in a folder that all hosts
share; other files are on own disks. `play` has the cases, in which all lanes run side by side.
`ship` brings the package to executors that lack it. `canary` looks for secrets in everything that a
job leaves behind. Results are stored in conf/standalone.json, from which `page` makes its part of
docs/clusters.md.
"""
