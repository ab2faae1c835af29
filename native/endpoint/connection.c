#include "connection.h"

#include "deadline.h"
#include "repair.h"

#include <stdio.h>
#include <string.h>

enum connection_step {
  CONNECTION_ADDRESS = 1, /* how the receiver reaches the sender of this */
  CONNECTION_READY = 2,   /* the sender of this has posted its receives */
};

struct connection_message {
  uint32_t magic;
  uint32_t step;
  struct peer_address address;
};

/* Not with the lock: the side channel may wait for threads that want it. */
static int send_step(struct engine *engine, int32_t to, enum connection_step step) {
  if (!engine->side_channel)
    return fail(MLXDIST_INVALID_ARGUMENT,
                "ranks %d and %d are not connected, and there is no side channel to connect "
                "them by",
                engine->rank, to);
  struct connection_message message = {.magic = WIRE_MAGIC, .step = step};
  peer_address(&engine->peers[to], &message.address);
  engine->side_channel(engine->side_channel_context, to, &message, sizeof message);
  return MLXDIST_OK;
}

/* Only at the start can all ranks agree to do without RDMA. */
static int explain_provider(const struct engine *engine, int status) {
  bool by_rdma = strstr(engine->provider, "ibverbs") || strstr(engine->provider, "librdma");
  if ((status != MLXDIST_RESOURCES && status != MLXDIST_TRANSPORT) || !by_rdma) return status;
  char why[ERROR_TEXT_BYTES];
  snprintf(why, sizeof why, "%s", mlxdist_last_error());
  return fail(status,
              "%s; in a world of more than %u ranks (MLXDIST_ON_DEMAND_THRESHOLD) two ranks connect on first use, "
              "too late for another provider: set MLXDIST_PROVIDER=soft to do without RDMA",
              why, engine->options.connect_at_start);
}

/* With the lock. `created` says whether the peer has to be told the address. */
static int create(struct engine *engine, struct peer *peer, bool *created) {
  *created = peer->channel_count == 0;
  return *created ? explain_provider(engine, peer_create(peer, engine)) : MLXDIST_OK;
}

static int begin(struct engine *engine, struct peer *peer) {
  bool created;
  engine_lock(engine);
  int status = create(engine, peer, &created);
  engine_unlock(engine);
  if (!status && created) status = send_step(engine, peer->rank, CONNECTION_ADDRESS);
  return status;
}

static const struct peer *unusable(const struct streams *streams) {
  for (int i = 0; i < streams->count; i++)
    if (!streams->list[i].lane->peer->usable) return streams->list[i].lane->peer;
  return 0;
}

static const struct peer *missing(const struct operation *operation) {
  const struct peer *peer = unusable(&operation->out);
  return peer ? peer : unusable(&operation->in);
}

static int begin_all(struct engine *engine, const struct streams *streams) {
  int status = MLXDIST_OK;
  for (int i = 0; i < streams->count && !status; i++)
    if (!streams->list[i].lane->peer->usable) status = begin(engine, streams->list[i].lane->peer);
  return status;
}

static int check_wires(const struct engine *engine, const struct streams *streams) {
  for (int i = 0; i < streams->count; i++) {
    int32_t rank = streams->list[i].lane->peer->rank;
    if (!engine_has_wire(engine, engine->rank, rank))
      return fail(MLXDIST_INVALID_ARGUMENT, "ranks %d and %d are not joined by a cable (MLXDIST_TOPOLOGY)",
                  engine->rank, rank);
  }
  return MLXDIST_OK;
}

int connection_make_all(struct operation *operation) {
  if (!missing(operation)) return MLXDIST_OK;
  struct engine *engine = operation->group->engine;
  int status = check_wires(engine, &operation->out);
  if (!status) status = check_wires(engine, &operation->in);
  if (!status) status = begin_all(engine, &operation->out);
  if (!status) status = begin_all(engine, &operation->in);
  struct waiting wait = {0};
  uint64_t begun = clock_ns();
  while (!status && missing(operation)) {
    engine_lock(engine);
    engine_wait(engine, &wait);
    engine_unlock(engine);
    status = failure_check(&engine->failure);
    const struct peer *late = missing(operation);
    if (!status && late) status = deadline_connect(engine, late->rank, (double)(clock_ns() - begun) * 1e-9);
  }
  return status;
}

void mlxdist_group_side_channel(mlxdist_group *group, mlxdist_side_channel send, void *context) {
  group->engine->side_channel_context = context;
  group->engine->side_channel = send;
}

static int take_address(struct engine *engine, struct peer *peer, const struct connection_message *message) {
  bool created = false;
  engine_lock(engine);
  int status = create(engine, peer, &created);
  if (!status && !peer->connected) status = explain_provider(engine, peer_connect(peer, &message->address));
  peer->usable = peer->connected && peer->answered;
  engine_unlock(engine);
  if (!status && created) status = send_step(engine, peer->rank, CONNECTION_ADDRESS);
  return status ? status : send_step(engine, peer->rank, CONNECTION_READY);
}

/* What goes wrong in the side channel's thread is everybody's error. */
static int report(struct engine *engine, int status) {
  if (!status) return MLXDIST_OK;
  engine_lock(engine);
  engine_fail(engine, 0, status);
  engine_unlock(engine);
  return status;
}

int mlxdist_group_message(mlxdist_group *group, int32_t from, const void *bytes, uint64_t length) {
  struct engine *engine = group->engine;
  struct connection_message message;
  bool is_peer = from >= 0 && from < engine->size && from != engine->rank;
  int status = MLXDIST_OK;
  if (is_peer && meeting_take(engine, &engine->peers[from], bytes, length)) return MLXDIST_OK;
  if (is_peer && repair_take(engine, &engine->peers[from], bytes, length, &status)) return report(engine, status);
  if (!is_peer || length != sizeof message)
    return fail(MLXDIST_INVALID_ARGUMENT, "%llu bytes from rank %d are no message of a connection",
                (unsigned long long)length, from);
  memcpy(&message, bytes, sizeof message);
  struct peer *peer = &engine->peers[from];
  if (message.magic == WIRE_MAGIC && message.step == CONNECTION_ADDRESS) {
    status = take_address(engine, peer, &message);
  } else if (message.magic == WIRE_MAGIC && message.step == CONNECTION_READY) {
    engine_lock(engine);
    peer->answered = true;
    peer->usable = peer->connected;
    engine_unlock(engine);
  } else {
    status = fail(MLXDIST_TRANSPORT, "rank %d sent rank %d a garbled message of a connection", from, engine->rank);
  }
  return report(engine, status);
}
