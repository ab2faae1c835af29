/* What mlxdist_group_stats returns: the counters of the group, of the engine and of the provider; and those of the
 * group by operation. */
#include "stats.h"

#include "group.h"
#include "layout.h"

#include <string.h>

_Static_assert(STATS_KINDS <= MLXDIST_OPERATION_NAMES, "a caller with that much room gets all entries");

static mlxdist_operation_stats read_kind(mlxdist_group *group, unsigned kind) {
  struct operation_counters *counters = &group->counters->operations[kind];
  unsigned variant = kind % STATS_VARIANTS;
  struct wire_descriptor descriptor = {.operation = (uint8_t)(kind / STATS_VARIANTS), .reduction = (uint8_t)variant};
  const char *name = descriptor.operation == WIRE_SEND ? layout_message(variant & STATS_SENDS, variant & STATS_RECEIVES)
                                                       : layout_operation(&descriptor);
  mlxdist_operation_stats entry = {.calls = counted(&counters->calls),
                                   .payload_bytes_sent = counted(&counters->payload_bytes_sent),
                                   .payload_bytes_received = counted(&counters->payload_bytes_received),
                                   .ns = counted(&counters->ns)};
  strncpy(entry.operation, name, sizeof entry.operation - 1);
  return entry;
}

uint64_t mlxdist_group_operation_stats(mlxdist_group *group, mlxdist_operation_stats *entries, uint64_t room) {
  uint64_t n = 0;
  for (unsigned kind = 0; kind < STATS_KINDS && n < room; kind++) {
    entries[n] = read_kind(group, kind);
    if (entries[n].calls) n++;
  }
  return n;
}

/* Of all kinds: calls of collectives and of messages, and the time of both. */
static void add_up(struct group_counters *counters, mlxdist_stats *stats) {
  for (unsigned kind = 0; kind < STATS_KINDS; kind++) {
    struct operation_counters *operations = &counters->operations[kind];
    uint64_t *calls = kind / STATS_VARIANTS == WIRE_SEND ? &stats->point_to_point : &stats->collectives;
    *calls += counted(&operations->calls);
    stats->operation_ns += counted(&operations->ns);
  }
}

void mlxdist_group_stats(mlxdist_group *group, mlxdist_stats *stats) {
  struct engine *engine = group->engine;
  struct group_counters *g = group->counters;
  struct transport_counters *e = &engine->transport_counters;
  struct verbs_counters provider = {0};
  engine_lock(engine);
  for (uint32_t i = 0; i < engine->transport.device_count; i++) {
    struct verbs_counters one = {0};
    const struct device *device = &engine->transport.devices[i];
    if (device->verbs->read_counters) device->verbs->read_counters(device->context, &one);
    provider.sends += one.sends;
    provider.receives += one.receives;
    provider.polls += one.polls;
    provider.bytes_sent += one.bytes_sent;
    provider.dropped += one.dropped;
    provider.dropped_by_fault += one.dropped_by_fault;
  }
  engine_unlock(engine);
  *stats = (mlxdist_stats){
      .payload_bytes_sent = counted(&g->payload_bytes_sent),
      .header_bytes_sent = counted(&e->header_bytes_sent),
      .padding_bytes_sent = counted(&e->padding_bytes_sent),
      .payload_bytes_received = counted(&g->payload_bytes_received),
      .messages_sent = counted(&e->messages_sent),
      .messages_received = counted(&e->messages_received),
      .control_messages_sent = counted(&e->control_messages_sent),
      .bytes_copied = counted(&g->bytes_copied),
      .post_send_calls = counted(&e->post_send_calls),
      .post_recv_calls = counted(&e->post_recv_calls),
      .poll_cq_calls = counted(&e->poll_cq_calls),
      .receives_posted = counted(&e->receives_posted),
      .retransmissions = counted(&e->retransmissions),
      .duplicates = counted(&e->duplicates),
      .damaged = counted(&e->damaged),
      .reconnections = counted(&e->reconnections),
      .meetings = counted(&engine->counters.meetings),
      .meeting_messages = counted(&engine->counters.meeting_messages),
      .memory_registrations = counted(&e->memory_registrations),
      .registration_hits = counted(&e->registration_hits),
      .registered_bytes = counted(&e->registered_bytes),
      .slab_bytes = counted(&e->slab_bytes),
      .wait_ns = counted(&g->wait_ns),
      .provider_sends = provider.sends,
      .provider_receives = provider.receives,
      .provider_polls = provider.polls,
      .provider_bytes_sent = provider.bytes_sent,
      .provider_dropped = provider.dropped,
      .provider_dropped_by_fault = provider.dropped_by_fault,
  };
  add_up(g, stats);
}
