/* What other libraries of this process see of this one. */
#pragma once

namespace mlxdist {

/* MLX opens the library so that its names are visible to all, and a real MPI that is loaded later would be bound to
 * them. MLX has looked them all up before it calls MPI_Init: from then on nothing finds them. Does nothing on macOS,
 * where a library is bound to the one that it was linked to. */
void hide_symbols();

}  // namespace mlxdist
