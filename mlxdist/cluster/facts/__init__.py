"""What a host reports about itself, collected once by collect.py; config, devices, doctor and benchmarks read it."""
