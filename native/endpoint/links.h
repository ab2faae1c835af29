/* Links: by which devices messages to each rank leave, as the caller has chosen. A device may serve many ranks (a
 * network adapter), or one (a Thunderbolt port). */
#ifndef MLXDIST_ENDPOINT_LINKS_H
#define MLXDIST_ENDPOINT_LINKS_H

#include "engine.h"

/* Opens the devices and sets every peer's links. `links`: as in the options. */
int links_open(struct engine* engine, const mlxdist_link* links);
void links_close(struct engine* engine);

#endif
