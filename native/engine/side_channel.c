#include "side_channel.h"

#include "group.h"
#include "reconnect.h"

void mlxdist_group_set_side_channel(mlxdist_group *group, mlxdist_side_channel send, void *context) {
  struct engine *engine = group->engine;
  engine->side_channel_context = context;
  engine->side_channel = send;
  transport_set_reconnect(&engine->transport, send != 0);
}

static void send_to(struct engine *engine, struct peer *peer, const struct reconnect_message *message) {
  engine->side_channel(engine->side_channel_context, peer->endpoint.rank, message, sizeof *message);
}

static bool next(struct engine *engine, struct peer *peer, struct reconnect_message *message) {
  engine_lock(engine);
  bool due = reconnect_next(&peer->endpoint, message);
  engine_unlock(engine);
  return due;
}

void side_channel_send_reconnects(struct engine *engine) {
  for (int32_t rank = 0; rank < engine->size; rank++) {
    struct peer *peer = &engine->peers[rank];
    struct reconnect_message message;
    while (atomic_load_explicit(&peer->endpoint.reconnects_pending, memory_order_relaxed) &&
           next(engine, peer, &message))
      send_to(engine, peer, &message);
  }
}

bool side_channel_receive_reconnect(struct engine *engine, struct peer *peer, const void *bytes, uint64_t length) {
  struct reconnect_message message, reply;
  if (!reconnect_read(&peer->endpoint, bytes, length, &message)) return false;
  engine_lock(engine);
  bool replies = reconnect_receive(&peer->endpoint, &message, &reply);
  engine_unlock(engine);
  side_channel_send_reconnects(engine); /* first its own address, if this queue pair is new too */
  if (replies) send_to(engine, peer, &reply);
  return true;
}
