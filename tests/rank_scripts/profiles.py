"""One rank of test_profiles.py: what the counters say about messages, their padding, and the faults they met."""

import numpy as np

import mlxdist

group = mlxdist.init()
large = np.full(300_000, group.rank(), dtype=np.float32)
registration = group.register(large)
for count in (0, 1, 900, 40_000, 300_000):
    for _ in range(20):
        total = mlxdist.all_sum(large[:count])
        assert (total == group.size() * (group.size() - 1) // 2).all()
group.barrier()
registration.release()
counters = group.stats()
sent = counters["payload_bytes_sent"] + counters["header_bytes_sent"] + counters["padding_bytes_sent"]
names = ("padding_bytes_sent", "provider_dropped", "provider_dropped_by_fault", "retransmissions", "slab_bytes")
names += ("control_messages_sent",)
print({name: counters[name] for name in names} | {"sent": sent, "provider_sent": counters["provider_bytes_sent"]})
print(group.provider)
