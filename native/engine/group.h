/* A group: the ranks that take part in an operation. All groups of a process share its engine. */
#pragma once

#include "engine.h"
#include "label.h"
#include "places.h"
#include "stats.h"

/* Groups beside this one for what must not mix with the operations of the user, such as split. */
#define GROUP_INTERNAL 0x8000u
#define GROUP_MAX_ID 0x7ffeu

/* The world's stream lane (mlxdist_group_stream_lane). */
#define GROUP_STREAM_LANE 0x7fffu

struct group_counters {
  struct operation_counters operations[STATS_KINDS];
  counter payload_bytes_sent, payload_bytes_received;
  counter bytes_copied;
  counter wait_ns;
};

/* This rank and one member. */
struct group_peer {
  struct peer* peer;             /* NULL for this rank itself */
  struct places sends, receives; /* of the messages to and from it */
  uint32_t counted;              /* the collective that is issued now: its place, */
  uint16_t outs, ins;            /* and its transfers so far */
};

/* Threads at a time that a group tells apart. */
#define GROUP_THREADS 64

struct group_thread {
  struct thread_life* _Atomic life;
  uint32_t number; /* in the order of first use, from 1 */
};

/* Members of a group among whom a part of an algorithm works, in the order in which they reduce. */
struct subset {
  const int32_t* members;      /* every `stride`-th is one; NULL: all of the group */
  int32_t stride, size, place; /* this rank's among them */
};

struct mlxdist_group {
  struct engine* engine;
  uint16_t id; /* 0: the world. Two groups with the same id have no two members in common */
  int32_t rank, size;
  struct group_peer* peers; /* one per member */
  int32_t* members;         /* their ranks in the world */
  int32_t* member_of;       /* of each rank of the world its number here, -1 for others */
  int32_t* ring;            /* the members in the order of the links, NULL if these make no ring */
  bool fully_connected;     /* a link joins every two members */
  int32_t hosts;            /* on which the members are, how many */
  int32_t* by_host; /* the members, host by host; NULL unless two hosts or more have as many, two or more each */
  struct subset everyone, of_host, across_hosts; /* the last: one of each host, all at the same place there */
  atomic_bool usable;                            /* this rank is connected to all of them */
  struct group_counters own_counters;
  struct group_counters* counters; /* its own; of the stream lane those of the world */
  struct places collectives;
  _Atomic uint64_t collectives_ended;
  uint64_t messages_issued;
  atomic_uint threads_seen;       /* that have called operations, */
  atomic_uint thread_count;       /* and those in the list */
  _Atomic pthread_t first_thread; /* 0 once it has ended: its id may be another thread's then */
  mlxdist_group* next_numbered;   /* another one that knows a thread */
  uint32_t turn_thread;           /* that has called the last collective, and */
  uint64_t turn_begin;            /* the place of its first one since another thread did */
  bool threads_overlap;           /* collectives of two threads have been in progress at a time */
  struct group_thread threads[GROUP_THREADS];
  double timeout;                  /* of its operations, in seconds; negative: that of the options */
  struct operation* _Atomic spare; /* one that has ended, for the next to use */
  mlxdist_group* internal;
};

/* The group with that id, NULL if there is none. */
static inline mlxdist_group* engine_group(const struct engine* engine, uint16_t id) {
  uint32_t index = id & ~GROUP_INTERNAL;
  mlxdist_group* group = index < engine->groups_capacity ? engine->groups[index] : 0;
  if (index == GROUP_STREAM_LANE) group = engine->stream_lane;
  return group && id & GROUP_INTERNAL ? group->internal : group;
}

static inline int32_t subset_member(const struct subset* subset, int32_t place) {
  return subset->members ? subset->members[(ptrdiff_t)place * subset->stride] : place;
}

/* See label.h. Most groups have one thread that calls operations. */
static inline uint64_t label_of_call(mlxdist_group* group, uint64_t text, uint64_t place) {
  bool only = atomic_load_explicit(&group->threads_seen, memory_order_relaxed) == 1 &&
              pthread_equal(atomic_load_explicit(&group->first_thread, memory_order_relaxed), pthread_self());
  return only || !place ? text : label_with_thread(group, text, place);
}

/* A group of the given ranks of the world, known to the engine from now on. */
int group_new(struct engine* engine, uint16_t id, const int32_t* members, int32_t size, mlxdist_group** group);
void group_free(mlxdist_group* group);
