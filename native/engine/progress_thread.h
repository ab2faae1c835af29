/*
 * The progress thread: makes progress when no thread of the program waits.
 *
 * It acknowledges what has arrived, retransmits what was lost and drives operations that the program has a handle of,
 * while all other threads compute. When there is nothing to do it looks every 15 ms.
 */
#pragma once

#include "engine.h"

int progress_start(struct engine* engine);
void progress_stop(struct engine* engine);

/* There is something to do now: the thread makes a turn at once. */
static inline void progress_wake(struct engine* engine) {
  pthread_mutex_lock(&engine->progress_lock);
  engine->progress_called = true;
  pthread_cond_signal(&engine->progress_wanted);
  pthread_mutex_unlock(&engine->progress_lock);
}
