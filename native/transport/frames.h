/* How large messages may be, and how many fit a queue, where a device cuts them into frames of 4096 bytes. */
#pragma once

#include "mlxdist.h"

#include <stdint.h>

struct device;

#define FRAME_BYTES 4096u

/* Frames of a message that fills a slot; 1 where the device counts messages. */
uint32_t frames_of_slot(const struct device* device, uint32_t slot_bytes);

/* When all devices are open: bulk slots of a size that all of them take, more of them where they are smaller. The peers
 * must come to the same (their addresses are compared). */
int frames_fit_slots(mlxdist_options* options, const struct device* devices, uint32_t count);
