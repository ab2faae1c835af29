/* A group: the ranks that take part in an operation. Today every group is the world. */
#ifndef MLXDIST_ENDPOINT_GROUP_H
#define MLXDIST_ENDPOINT_GROUP_H

#include "engine.h"

/* More ranks need the ring of a later version, not a connection between every two. */
#define GROUP_MAX_RANKS 256

struct mlxdist_group {
  struct engine engine;
  bool connected;
  bool finalized;
};

/* Brackets of every operation: checks the layout, takes the lock, refuses a failed or finalized group;
 * then counts the time, and on failure tells the peers. */
int operation_begin(mlxdist_group *group, const char *name, const mlxdist_layout *layout, uint64_t *started);
int operation_end(mlxdist_group *group, int status, uint64_t started, counter *kind);

/* The rank-th peer, or NULL with the reason given if it is out of range or this rank itself. */
struct peer *group_peer(mlxdist_group *group, const char *name, int32_t rank);

#endif
