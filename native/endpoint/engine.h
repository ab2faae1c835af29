/*
 * The engine: the devices, a peer for every other rank, and the operations in progress. One per process.
 *
 * The thread that holds the lock may take a *turn*: move every operation as far as it goes now, of whatever group, and
 * take what has completed. A thread that waits takes one after the other, without the lock in between; when none waits,
 * the progress thread does.
 */
#ifndef MLXDIST_ENDPOINT_ENGINE_H
#define MLXDIST_ENDPOINT_ENGINE_H

#include "counters.h"
#include "device.h"
#include "failure.h"
#include "flight.h"
#include "mlxdist.h"
#include "peer.h"
#include "standstill.h"
#include "wait.h"

#include <pthread.h>

struct operation;

/* The last peer that an operation stood still for, of those that kept it for DEADLINE_LATE_S and more. */
struct late_peer {
  int32_t rank;
  double seconds;
  uint64_t seen_ns; /* 0: there was none */
  char operation[192];
};

struct engine {
  int32_t rank, size;
  char host[256];
  mlxdist_options options;
  bool one_host;  /* the software provider joins the ranks as it does within a host */
  bool crowded;   /* there are more ranks than cores */
  uint8_t* wires; /* size x size, NULL if every pair has a cable */
  mlxdist_tuning* tuning;
  uint64_t tuning_lines;
  struct device* devices; /* all that any peer is reached by */
  uint32_t device_count;
  char provider[64];      /* name of their provider, or of all */
  struct peer* peers;     /* one per rank; the own one stays empty */
  mlxdist_group** groups; /* by id; those that do not exist any more are NULL */
  uint32_t groups_room;
  int32_t next_group_id; /* the lowest that no group of this rank has had */
  struct mlxdist_region* regions;
  uint64_t region_uses;
  struct operation *active, *active_last; /* in the order in which they were issued */
  int active_count;
  uint64_t operations; /* so many have been issued */
  uint32_t moves;      /* steps of any operation */
  int unattended;      /* of them those that somebody has a handle of */
  pthread_mutex_t lock;
  atomic_int contenders; /* threads that wait for the lock */
  atomic_int waiters;    /* threads that take turns until their operation has ended */
  struct failure failure;
  struct flight flight;
  atomic_bool finalized;
  bool ended; /* all operations have been told about the failure */
  struct engine_counters counters;
  struct late_peer late;
  struct waiting_thread threads[MLXDIST_THREADS]; /* those that have waited here */
  uint32_t next_thread;
  uint64_t timers_ns; /* when the timers were looked at last */

  pthread_t progress; /* the progress thread */
  bool progress_runs;
  pthread_mutex_t progress_lock;
  pthread_cond_t progress_wanted;
  bool progress_called, progress_ends;

  mlxdist_side_channel side_channel;
  void* side_channel_context;
};

/* Opens the devices, and creates the peers if all pairs are to be connected at the start. */
int engine_open(struct engine* engine, const mlxdist_link* links);
void engine_close(struct engine* engine);

void engine_lock(struct engine* engine);
void engine_unlock(struct engine* engine);
/* For who must not wait long: a thread that holds the lock may be stuck. False: after a second it was not free. */
bool engine_lock_soon(struct engine* engine);
/* Lets another thread have the lock for a while if one waits for it. */
void engine_yield(struct engine* engine);

/* With the lock: every operation as far as it goes, then what has completed. `moved` is set if anything has. An
 * error fails the engine and ends all operations. */
void engine_turn(struct engine* engine, bool* moved);

/* With the lock: a turn, and where nothing has moved a little waiting without the lock, and a look at the timers. */
void engine_wait(struct engine* engine, struct waiting* wait);

/* With the lock: repeats what was not acknowledged for long, acknowledges what found no ride, and fails operations
 * whose deadline has passed. Does so only now and then. */
void engine_look_at_timers(struct engine* engine, uint64_t now_ns);

/* With the lock: whether a peer still has to confirm something, or waits for a confirmation. */
bool engine_is_settled(const struct engine* engine);

/* Fails all groups with the text of mlxdist_last_error() and tells every peer. `operation`: where it happened, or
 * NULL. */
void engine_fail(struct engine* engine, const struct operation* operation, int status);

/* Whether two ranks of the world are joined by a cable. */
static inline bool engine_has_wire(const struct engine* engine, int32_t a, int32_t b) {
  return !engine->wires || engine->wires[a * engine->size + b];
}

/* The group with that id, NULL if there is none. */
mlxdist_group* engine_group(const struct engine* engine, uint16_t id);
int engine_add_group(struct engine* engine, mlxdist_group* group);

#define ENGINE_EPOCHS 0x1fffu /* wr_id has room for */

/* wr_id says on which channel and slot or request a work request was: nothing of it travels. */
static inline uint64_t engine_wr_id(const struct channel* channel, bool send, uint32_t number) {
  return (uint64_t)send << 63 | (uint64_t)(channel->epoch & ENGINE_EPOCHS) << 50 | (uint64_t)channel->index << 48 |
         (uint64_t)(uint32_t)channel->peer->rank << 32 | number;
}

#endif
