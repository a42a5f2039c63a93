"""Several hosts on one machine: real clusters and bad networks for tests.

    .venv/bin/python -m tests.hosts.networks --only drop      # a case of docs/networks.md
    .venv/bin/python -m tests.hosts.replication               # the table in docs/clusters.md

Layers, lowest first:

- `world`: a command runs in network, mount and pid namespaces of its own, with its own /tmp and
  /run in memory. When the command's process dies in any way, the kernel removes all the world's
  processes, interfaces, mounts and files: a killed run leaves nothing behind.
- `bed`: inside a world, `Bed` is a bridge and `Host` a machine at the bridge. A host has its own
  address, name, hosts file, pid namespace, and a disk at /run/disk that no other host sees.
  `Host.kill` pulls the plug.
- `forwarder`: takes a host's cable off the bridge and passes its frames on with delay, loss, a
  rate, a longest frame, resets or refusals. The kernels of build machines have no netem.
- `nodes`: name servers and brokers on hosts, by the classes of `rocket_sink.cluster`.
- `load`, `lanes`: the senders, each in a process on a host. `witness`: compares the messages that
  the official Java client reads afterwards with the answers to the senders.
- `play`: plays a fault while senders work, and measures. `networks`, `replication`: the cases.

Needs Linux, root (or user namespaces), iproute2 and util-linux; `world.missing()` names missing
tools. RocketMQ's jars are fetched before. Spark's packages must be in Ivy's cache, where any Spark
test puts them.
"""
