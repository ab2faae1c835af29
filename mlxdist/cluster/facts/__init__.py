"""The facts that a host reports about itself, collected by collect.py for config, devices, doctor and benchmarks."""
