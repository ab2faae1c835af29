/*
 * The engine: the transport, a peer for every other rank, and the operations in progress. One per process.
 *
 * The thread that holds the lock may make progress (progress.h): it moves every operation as far as it goes now, of
 * whatever group, and takes what has completed. A waiting thread does so again and again, without the lock in between;
 * when none waits, the progress thread does.
 */
#pragma once

#include "backoff.h"
#include "deadlock.h"
#include "failure.h"
#include "flight_recorder.h"
#include "layout.h"
#include "mlxdist.h"
#include "peer.h"
#include "transport.h"

#include <pthread.h>

struct operation;

struct engine_counters {
  counter meetings, meeting_messages;
};

/* The last peer that an operation waited for, of those that kept it for STRAGGLER_KEPT_S and more. */
struct late_peer {
  int32_t rank;
  double seconds;
  uint64_t seen_ns; /* 0: there was none */
  struct layout_name operation;
};

#define GROUP_IDS 0x8000u /* that there are, with that of the stream lane */

struct engine {
  int32_t rank, size;
  char host[256];
  mlxdist_options options;
  struct transport_counters transport_counters;
  struct transport transport;
  bool one_host;      /* the software provider joins the ranks as it does within a host */
  bool crowded;       /* there are more ranks than cores */
  uint8_t* adjacency; /* size x size, NULL if every pair has a link */
  int32_t* hosts;     /* of each rank, NULL if all are on one */
  mlxdist_tuning* tuning;
  uint64_t tuning_lines;
  struct peer* peers;     /* one per rank; the own one stays empty */
  mlxdist_group** groups; /* by id; those that do not exist any more are NULL */
  uint32_t groups_capacity;
  mlxdist_group* stream_lane;             /* of the world; not among the groups */
  uint8_t used_group_ids[GROUP_IDS / 8];  /* as a mask; of those of a group that this rank has had, or tried */
  int32_t next_group_id;                  /* one more than the highest of them */
  struct operation *active, *active_last; /* in the order in which they were issued */
  int active_count;
  uint64_t unexpected_count; /* messages of all peers that no transfer expects */
  uint64_t operations;       /* that have been issued */
  uint32_t progress_count;   /* steps of any operation */
  int handles_in_progress;   /* operations that the program has a handle of */
  pthread_mutex_t lock;
  atomic_int contenders; /* threads that wait for the lock */
  atomic_int waiters;    /* threads that make progress until their operation has ended */
  struct failure failure;
  struct flight_recorder flight_recorder;
  atomic_bool finalized;
  bool ended; /* all operations have ended with the failure */
  struct engine_counters counters;
  struct late_peer late;
  struct deadlock_thread threads[MLXDIST_THREADS]; /* those that have waited here */
  uint32_t next_thread;
  uint64_t timers_ns; /* when the timers were looked at last */

  pthread_t progress;           /* the progress thread */
  _Atomic uint64_t progress_id; /* as the system counts threads */
  bool progress_runs;
  pthread_mutex_t progress_lock;
  pthread_cond_t progress_wanted;
  bool progress_called, progress_ends;

  mlxdist_side_channel side_channel;
  void* side_channel_context;
};

/* Opens the devices, and creates the queue pairs if all pairs are to be connected at the start. */
int engine_new(int32_t rank, int32_t size, const mlxdist_options* options, const struct transport_callbacks* callbacks,
               struct engine** engine);
void engine_free(struct engine* engine);

void engine_lock(struct engine* engine);
static inline void engine_unlock(struct engine* engine) { pthread_mutex_unlock(&engine->lock); }
/* For a thread that must not wait long: one that holds the lock may be stuck. False: after a second it was not free. */
bool engine_lock_soon(struct engine* engine);
/* A mutex is not fair: lets another thread have the lock for a while. */
void engine_let_in(struct engine* engine);
static inline void engine_yield(struct engine* engine) {
  if (atomic_load_explicit(&engine->contenders, memory_order_relaxed) > 0) engine_let_in(engine);
}

/* Whether a link joins two ranks of the world. */
static inline bool engine_is_adjacent(const struct engine* engine, int32_t a, int32_t b) {
  return !engine->adjacency || engine->adjacency[a * engine->size + b];
}

/* With the lock: the group is found by its id from now on (group.h). MISMATCH: another one is. */
int engine_add_group(struct engine* engine, mlxdist_group* group);
/* It is not found any more. Takes the lock. */
void engine_remove_group(struct engine* engine, const mlxdist_group* group);

/* What this rank would call its next group. */
int32_t engine_next_group_id(struct engine* engine);
/* Takes this id for one group of this rank, for ever; false if it is taken. */
bool engine_take_group_id(struct engine* engine, int32_t id);

/* No operation begins any more. */
void engine_finalize(struct engine* engine);
