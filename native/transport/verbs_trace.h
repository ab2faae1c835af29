/* The verbs that set up and tear down a connection, as debug output of the subsystem "verbs": attributes, result,
 * errno.
 *
 * Messages are posted and polled through context->ops, which this leaves alone: tracing costs them nothing. */
#pragma once

#include "verbs.h"

/* `verbs` itself, or a table that writes a line for each call, where MLXDIST_DEBUG asks for "trace". The same table for
 * the same provider. */
const struct verbs* verbs_trace(const struct verbs* verbs);
