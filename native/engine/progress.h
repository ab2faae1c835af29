/* Progress: what has completed is taken, and every operation goes as far as it can. */
#pragma once

#include "engine.h"

/* What the transport calls. */
extern const struct transport_callbacks progress_callbacks;

/* With the lock: takes what has completed, then every operation goes as far as it can. `progressed` is set if anything
 * has. An error fails the engine and ends all operations. */
void engine_progress(struct engine* engine, bool* progressed);

/* With the lock: the same, and where nothing has progressed a pause without the lock, and a look at the timers. */
void engine_wait(struct engine* engine, struct backoff* backoff);
