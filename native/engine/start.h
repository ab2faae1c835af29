/* Starting an operation, and waiting for its end: by the thread that calls it, or through a handle. */
#pragma once

#include "operation.h"

/* Starts the operation, with its place in the order; waits until it has ended, or leaves a handle in `call`. Here,
 * once, it is checked that the group is usable: not finalized, connected, without a failure. */
int operation_start(struct operation* operation, mlxdist_call* call);
