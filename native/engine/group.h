/* A group: the ranks that take part in an operation. All groups of a process share its engine. */
#pragma once

#include "engine.h"

/* A rank's number travels in 15 bits; connections between every two of more ranks would not fit a device. */
#define GROUP_MAX_RANKS 256

/* Groups beside this one for what must not mix with the operations of the user, such as split. */
#define GROUP_INTERNAL 0x8000u
#define GROUP_MAX_ID 0x7fffu

struct group_counters {
  counter collectives, point_to_point;
  counter payload_bytes_sent, payload_bytes_received;
  counter bytes_copied;
  counter wait_ns, operation_ns;
};

/* The transfers between this rank and one member. */
struct group_peer {
  struct peer* peer;       /* NULL for this rank itself */
  uint32_t sent, received; /* numbers of the last transfers that were issued */
  uint32_t cts;            /* of the last one to it that it has begun to receive */
  uint32_t collective_seq; /* of the last ordered collective of the group that was issued here */
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
  atomic_bool usable;       /* this rank is connected to all of them */
  struct group_counters counters;
  uint64_t collectives_issued, messages_issued;
  double timeout;                  /* of its operations, in seconds; negative: that of the options */
  struct operation* _Atomic spare; /* one that has ended, for the next to use */
  mlxdist_group* internal;
};

/* The group with that id, NULL if there is none. */
static inline mlxdist_group* engine_group(const struct engine* engine, uint16_t id) {
  uint32_t index = id & ~GROUP_INTERNAL;
  mlxdist_group* group = index < engine->groups_capacity ? engine->groups[index] : 0;
  return group && id & GROUP_INTERNAL ? group->internal : group;
}

/* A group of the given ranks of the world, known to the engine from now on. */
int group_new(struct engine* engine, uint16_t id, const int32_t* members, int32_t size, mlxdist_group** group);
void group_free(mlxdist_group* group);
