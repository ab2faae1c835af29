/*
 * The engine: one device, one completion queue, and a peer for every other rank.
 *
 * It sees the device through the verbs table only. The lock is held by the operation in progress; the
 * failure may be set by any thread.
 */
#ifndef MLXDIST_ENDPOINT_ENGINE_H
#define MLXDIST_ENDPOINT_ENGINE_H

#include "counters.h"
#include "failure.h"
#include "mlxdist.h"
#include "peer.h"
#include "wait.h"

#include <pthread.h>

struct engine {
  const struct verbs *verbs;
  struct ibv_context *context;
  struct ibv_pd *pd;
  struct ibv_cq *cq;
  struct ibv_port_attr port;
  union ibv_gid gid;
  int32_t rank, size;
  mlxdist_options options;
  struct peer *peers; /* one per rank; the own one stays empty */
  pthread_mutex_t lock;
  struct failure failure;
  struct counters counters;
};

int engine_open(struct engine *engine);
void engine_close(struct engine *engine);

/* Takes what has completed. `moved` is set if anything has. */
int engine_poll(struct engine *engine, bool *moved);

/* Tells the peers what they must know to go on; `lazily` waits longer for data to ride on. */
int engine_acknowledge(struct engine *engine, bool lazily);

/* One turn without progress: watches for failure, acknowledges what is owed, waits a little. `waited` is
 * set to the seconds since the last progress. */
int engine_idle(struct engine *engine, struct waiting *wait, double *waited);

/* Fails the group with the text of mlxdist_last_error() and tells every peer. Returns `status`. */
int engine_fail(struct engine *engine, int status);

/* Waits until every peer has all data and was told that all of its own has arrived. */
int engine_drain(struct engine *engine);

/* wr_id says on which channel and slot or sequence a work request was: nothing of it travels. */
static inline uint64_t engine_wr_id(const struct channel *channel, bool send, uint32_t number) {
  return (uint64_t)send << 63 | (uint64_t)channel->index << 48 | (uint64_t)(uint32_t)channel->peer->rank << 32 | number;
}

#endif
