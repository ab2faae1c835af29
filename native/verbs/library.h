/* The system's verbs library, opened when it is asked for: libibverbs.so.1 ("ibverbs"), macOS's librdma.dylib
 * ("librdma"). Nothing of it is needed to build mlxdist or to start it. */
#pragma once

#include "verbs.h"

/* NULL where this system has no such library or it lacks what we use, and a sentence in `why` that names all of it.
 * Any thread; opened once per process, and never closed: its own providers do not survive that. */
const struct verbs* verbs_library(const char* name, char* why, size_t bytes);
