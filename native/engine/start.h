/* Starting an operation, and waiting for its end: by the thread that calls it, or through a handle. */
#pragma once

#include "operation.h"

/* Starts the operation. Without `handle` waits until it has ended. Here, once, it is checked that the group is usable:
 * not finalized, connected, without a failure. */
int operation_start(struct operation* operation, mlxdist_handle** handle);
