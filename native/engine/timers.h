/* What happens because time has passed: the transport's timers, a repeated clear to send, deadlines. */
#pragma once

#include "engine.h"

/* With the lock. Does so only now and then. */
void engine_check_timers(struct engine* engine, uint64_t now_ns);
