/* Operations that are started and looked at later, with what their results must be. */
#pragma once

#include "mlxdist.h"

#include <stdbool.h>

enum simulated_kind {
  SIMULATED_SUM,       /* all_reduce */
  SIMULATED_GATHER,    /* all_gather */
  SIMULATED_SCATTER,   /* reduce_scatter */
  SIMULATED_BROADCAST, /* from rank `root` */
  SIMULATED_EXCHANGE,  /* all_to_all */
  SIMULATED_SHIFT,     /* sendrecv: to the next rank, from the previous one */
  SIMULATED_BARRIER,
  SIMULATED_KINDS,
};

struct simulated_step {
  enum simulated_kind kind;
  uint64_t count; /* int32 of `in`, or of a rank's part of it */
  int32_t root;
  uint64_t salt; /* values differ by it */
};

struct simulated_operation {
  struct simulated_step step;
  int32_t rank, size;
  int status; /* of the start */
  mlxdist_call call;
  int32_t *in, *out;
};

void simulated_start(struct simulated_operation* operation, mlxdist_group* group, struct simulated_step step);

/* Also where it could not be started. */
bool simulated_has_ended(const struct simulated_operation* operation);

/* Its status; where that is MLXDIST_OK, `out` must be right. */
int simulated_end(struct simulated_operation* operation);
