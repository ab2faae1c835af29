#include "connection.h"

#include "abort.h"
#include "deadline.h"
#include "error.h"
#include "meeting_wait.h"
#include "progress.h"
#include "side_channel.h"
#include "steady_clock.h"

#include <stdio.h>
#include <string.h>

enum connection_step {
  CONNECTION_ADDRESS = 1, /* how the receiver reaches the sender of this */
  CONNECTION_READY = 2,   /* the sender of this has posted its receives */
};

struct connection_message {
  uint32_t magic;
  uint32_t step;
  struct endpoint_address address;
};

/* Not with the lock: the side channel may wait for threads that want it. */
static int send_step(struct engine *engine, int32_t to, enum connection_step step) {
  if (!engine->side_channel)
    return fail(MLXDIST_INVALID_ARGUMENT,
                "ranks %d and %d are not connected, and there is no side channel to connect "
                "them by",
                engine->rank, to);
  struct connection_message message = {.magic = WIRE_MAGIC, .step = step};
  endpoint_address(&engine->peers[to].endpoint, &message.address);
  engine->side_channel(engine->side_channel_context, to, &message, sizeof message);
  return MLXDIST_OK;
}

/* Only at the start can all ranks agree to do without RDMA. */
static int explain_provider(const struct engine *engine, int status) {
  bool by_rdma = strstr(engine->transport.provider, "ibverbs") || strstr(engine->transport.provider, "librdma");
  if ((status != MLXDIST_RESOURCES && status != MLXDIST_TRANSPORT) || !by_rdma) return status;
  char why[ERROR_TEXT_BYTES];
  snprintf(why, sizeof why, "%s", mlxdist_last_error());
  return fail(status,
              "%s; in a world of more than %u ranks (MLXDIST_ON_DEMAND_THRESHOLD) two ranks connect on first use, "
              "too late for another provider: set MLXDIST_PROVIDER=soft to do without RDMA",
              why, engine->options.on_demand_threshold);
}

/* With the lock. `created` says whether the peer needs the address. */
static int create(struct engine *engine, struct peer *peer, bool *created) {
  *created = peer->endpoint.channel_count == 0;
  return *created ? explain_provider(engine, endpoint_create(&peer->endpoint)) : MLXDIST_OK;
}

static int begin(struct engine *engine, struct peer *peer) {
  bool created;
  engine_lock(engine);
  int status = create(engine, peer, &created);
  engine_unlock(engine);
  if (!status && created) status = send_step(engine, peer->endpoint.rank, CONNECTION_ADDRESS);
  return status;
}

/* That of the i-th transfer: first those that leave, then those that arrive. NULL behind the last one. */
static struct peer *peer_at(const struct operation *operation, int i) {
  const struct transfers *transfers = i < operation->out.count ? &operation->out : &operation->in;
  if (transfers == &operation->in) i -= operation->out.count;
  return i < transfers->count ? transfers->list[i].group_peer->peer : 0;
}

static const struct peer *missing(const struct operation *operation) {
  struct peer *peer;
  for (int i = 0; (peer = peer_at(operation, i)); i++)
    if (!peer->endpoint.usable) return peer;
  return 0;
}

static int begin_all(const struct operation *operation) {
  struct peer *peer;
  int status = MLXDIST_OK;
  for (int i = 0; !status && (peer = peer_at(operation, i)); i++)
    if (!peer->endpoint.usable) status = begin(operation->group->engine, peer);
  return status;
}

static int check_adjacent(const struct operation *operation) {
  const struct engine *engine = operation->group->engine;
  const struct peer *peer;
  for (int i = 0; (peer = peer_at(operation, i)); i++)
    if (!engine_is_adjacent(engine, engine->rank, peer->endpoint.rank))
      return fail(MLXDIST_INVALID_ARGUMENT, "no link joins ranks %d and %d (MLXDIST_TOPOLOGY)", engine->rank,
                  peer->endpoint.rank);
  return MLXDIST_OK;
}

/* Whether this rank is connected to all members: then no operation of the group looks any more. */
static bool is_connected(const mlxdist_group *group) {
  for (int32_t member = 0; member < group->size; member++)
    if (group->peers[member].peer && !group->peers[member].peer->endpoint.usable) return false;
  return true;
}

static int wait_for(const struct operation *operation) {
  struct engine *engine = operation->group->engine;
  struct backoff backoff = {0};
  uint64_t begun = clock_ns();
  int status = MLXDIST_OK;
  while (!status && missing(operation)) {
    engine_lock(engine);
    engine_wait(engine, &backoff);
    engine_unlock(engine);
    status = failure_check(&engine->failure);
    const struct peer *late = missing(operation);
    double waited = (double)(clock_ns() - begun) * 1e-9;
    if (!status && late) status = deadline_connect(engine, operation->timeout, late->endpoint.rank, waited);
  }
  return status;
}

/* What goes wrong is everybody's error: the peer waits for this rank, and knows nothing. */
static int report(struct engine *engine, int status) {
  if (!status || failure_check(&engine->failure)) return status;
  engine_lock(engine);
  engine_fail(engine, 0, status);
  engine_unlock(engine);
  return status;
}

int connection_make_all(struct operation *operation) {
  int status = MLXDIST_OK;
  if (missing(operation) && !operation->group->engine->finalized) {
    status = check_adjacent(operation);
    if (!status) status = begin_all(operation);
    if (!status) status = wait_for(operation);
    /* Arguments are the caller's, and another call may have better ones. */
    if (status != MLXDIST_INVALID_ARGUMENT) status = report(operation->group->engine, status);
  }
  operation->group->usable = is_connected(operation->group);
  return status;
}

static int take_address(struct engine *engine, struct peer *peer, const struct connection_message *message) {
  bool created = false;
  engine_lock(engine);
  int status = create(engine, peer, &created);
  if (!status && !peer->endpoint.connected)
    status = explain_provider(engine, endpoint_connect(&peer->endpoint, &message->address));
  peer->endpoint.usable = peer->endpoint.connected && peer->endpoint.answered;
  engine_unlock(engine);
  if (!status && created) status = send_step(engine, peer->endpoint.rank, CONNECTION_ADDRESS);
  return status ? status : send_step(engine, peer->endpoint.rank, CONNECTION_READY);
}

int mlxdist_group_side_channel_receive(mlxdist_group *group, int32_t from, const void *bytes, uint64_t length) {
  struct engine *engine = group->engine;
  struct connection_message message;
  bool is_peer = from >= 0 && from < engine->size && from != engine->rank;
  int status = MLXDIST_OK;
  if (is_peer && meeting_receive(engine, &engine->peers[from], bytes, length)) return MLXDIST_OK;
  if (is_peer && side_channel_receive_reconnect(engine, &engine->peers[from], bytes, length)) return MLXDIST_OK;
  if (!is_peer || length != sizeof message)
    return fail(MLXDIST_INVALID_ARGUMENT, "%llu bytes from rank %d are no message of a connection",
                (unsigned long long)length, from);
  memcpy(&message, bytes, sizeof message);
  struct peer *peer = &engine->peers[from];
  if (message.magic == WIRE_MAGIC && message.step == CONNECTION_ADDRESS) {
    status = take_address(engine, peer, &message);
  } else if (message.magic == WIRE_MAGIC && message.step == CONNECTION_READY) {
    engine_lock(engine);
    peer->endpoint.answered = true;
    peer->endpoint.usable = peer->endpoint.connected;
    engine_unlock(engine);
  } else {
    status = fail(MLXDIST_TRANSPORT, "rank %d sent rank %d a garbled message of a connection", from, engine->rank);
  }
  return report(engine, status);
}
