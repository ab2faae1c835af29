/* Static rates: the numbers of enum ibv_rate, as multiples of 2.5 Gbit/s and in Mbit/s. */
#include "softverbs.h"

static const struct rate {
  int mult; /* 0: none */
  int mbps;
} rates[] = {
    [2] = {1, 2500},      [3] = {4, 10000},     [4] = {12, 30000},     [5] = {2, 5000},     [6] = {8, 20000},
    [7] = {16, 40000},    [8] = {24, 60000},    [9] = {32, 80000},     [10] = {48, 120000}, [11] = {0, 14062},
    [12] = {0, 56250},    [13] = {0, 112500},   [14] = {0, 168750},    [15] = {0, 25781},   [16] = {0, 103125},
    [17] = {0, 206250},   [18] = {0, 309375},   [19] = {11, 28125},    [20] = {20, 53125},  [21] = {160, 425000},
    [22] = {240, 637500}, [23] = {320, 850000}, [24] = {480, 1275000},
};
#define RATES ((int)(sizeof rates / sizeof *rates))

int ibv_rate_to_mult(int rate) { return rate >= 0 && rate < RATES && rates[rate].mult ? rates[rate].mult : -1; }

int ibv_rate_to_mbps(int rate) { return rate >= 0 && rate < RATES && rates[rate].mbps ? rates[rate].mbps : -1; }

int mult_to_ibv_rate(int mult) {
  for (int rate = 0; rate < RATES; rate++)
    if (mult > 0 && rates[rate].mult == mult) return rate;
  return 0; /* IBV_RATE_MAX */
}

int mbps_to_ibv_rate(int mbps) {
  for (int rate = 0; rate < RATES; rate++)
    if (mbps > 0 && rates[rate].mbps == mbps) return rate;
  return 0;
}
