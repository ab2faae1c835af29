/* The names of POSIX segments. A name is 64 bits, of them 48 random: it cannot be guessed, and only
 * its owner may open it. */
#ifndef MLXDIST_SOFT_NAMES_H
#define MLXDIST_SOFT_NAMES_H

#include <stdbool.h>
#include <stdint.h>

#define NAME_BYTES 32 /* macOS: 31 characters at most */

void names_write(uint64_t nonce, char name[NAME_BYTES]);

/* macOS cannot list shared memory. So this process notes each name before it makes it, in a folder of this user, and
 * strikes it out when the name is gone. Best effort: where the folder cannot be made, nothing is noted. */
void names_note(uint64_t nonce);
void names_strike_out(uint64_t nonce);

/* Removes the names that processes left which do not exist any more. A process id that was given again keeps them. */
void names_remove_dead(void);

/* The nonce, of those that were noted and not struck out, for which the function returns the number. */
bool names_find(uint32_t (*number_of)(uint64_t nonce), uint32_t number, uint64_t* nonce);

#endif
