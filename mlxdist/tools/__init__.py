"""Tools that measure, check and watch: bench, calibrate, doctor, observe, shard."""
