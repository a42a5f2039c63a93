"""The state of a broker in a fault table, from the table's view."""

from rocket_sink.routing.fault import FAILING, entry_name


def is_available(faults, name, now_s, topic=None):
    """Return whether neither the broker nor the topic on it is isolated."""
    ranks = faults.ranks(now_s)
    return not ranks.get(name) and not ranks.get(entry_name(topic or "", name))


def is_reachable(faults, name):
    """Return whether the broker answered its last request, or a later probe."""
    item = faults.store.get(name)
    return item is None or item.reachable


def isolate(brokers, name, now_s, *, reachable):
    """Isolate a broker after a failure."""
    brokers.faults.update(name, 1.0, now_s, rank=FAILING, reachable=reachable, cause="CODE_1")
