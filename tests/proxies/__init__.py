"""RocketMQ's own proxies in front of real brokers; Java's client reads what is stored."""
