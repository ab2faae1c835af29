/* With which status the program exits. When exit handlers run, Python has forgotten it. */
#pragma once

#include <optional>

namespace mlxdist {

/* With the interpreter's lock, in the main thread: from now on each SystemExit is looked at when it is dropped. Where
 * the program catches it that is while a frame of Python runs; by the interpreter, while none does. */
void watch_exits();

/* That of the SystemExit that the interpreter has dropped in the main thread; empty if there is none. */
std::optional<int> exit_status();

} // namespace mlxdist
