/* How all ranks meet: the barrier, and the end of the group. */
#ifndef MLXDIST_COLLECTIVES_BARRIER_H
#define MLXDIST_COLLECTIVES_BARRIER_H

#include "operation.h"

/* Returns once every rank has called it as the same operation. */
int barrier_run(mlxdist_group* group, enum wire_operation as, mlxdist_handle** handle);

#endif
