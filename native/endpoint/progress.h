/*
 * The progress thread: takes turns when nobody waits.
 *
 * It confirms what has arrived, sends again what was lost and drives operations that somebody has a handle of, while
 * all other threads compute. When there is nothing to do it looks every 15 ms.
 */
#ifndef MLXDIST_ENDPOINT_PROGRESS_H
#define MLXDIST_ENDPOINT_PROGRESS_H

#include "engine.h"

int progress_start(struct engine* engine);
void progress_stop(struct engine* engine);

/* There is something to do now. */
void progress_call(struct engine* engine);

#endif
