/* With which status the program exits. When exit handlers run, Python has forgotten it. */
#pragma once

#include <optional>

namespace mlxdist {

/* With the interpreter's lock, in the main thread: from now on it is noted when SystemExit.code is read. The program
 * reads it while a frame of Python runs; the interpreter, which ends the program with it, while none does. */
void watch_exits();

/* That of the SystemExit with which the interpreter ends the program; empty if there is none. */
std::optional<int> exit_status();

}  // namespace mlxdist
