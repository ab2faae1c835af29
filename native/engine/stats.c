/* What mlxdist_group_stats returns: the counters of the group, of the engine and of the provider. */
#include "group.h"

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
      .collectives = counted(&g->collectives),
      .point_to_point = counted(&g->point_to_point),
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
      .operation_ns = counted(&g->operation_ns),
      .provider_sends = provider.sends,
      .provider_receives = provider.receives,
      .provider_polls = provider.polls,
      .provider_bytes_sent = provider.bytes_sent,
      .provider_dropped = provider.dropped,
      .provider_dropped_by_fault = provider.dropped_by_fault,
  };
}
