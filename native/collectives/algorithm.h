/* Which algorithm an operation uses: forced, from the measured table, or by default. Equal on all ranks. */
#ifndef MLXDIST_COLLECTIVES_ALGORITHM_H
#define MLXDIST_COLLECTIVES_ALGORITHM_H

#include "group.h"

/* `layout` is that of the operation's input, NULL where there is none. */
enum mlxdist_algorithm choose(const mlxdist_group* group, enum mlxdist_operation operation,
                              const mlxdist_layout* layout);

#endif
