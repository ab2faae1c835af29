/* The straggler: the rank that an operation waits for. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct operation;

struct straggler {
  int32_t rank;      /* of the world, -1: none in particular */
  bool entered;      /* something of this operation has come from it */
  bool receives;     /* the transfer comes from it, */
  uint64_t transfer; /* and is that one (mlxdist_wait); else it goes to it */
  bool needs_entry;  /* the operation cannot go on before the rank has issued the transfer */
};

struct straggler operation_straggler(const struct operation* operation);

/* A wait of this many seconds or more is kept in engine->late. */
#define STRAGGLER_KEPT_S 1.0
