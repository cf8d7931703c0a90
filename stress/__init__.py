"""The stress harness: random load with known answers on a live engine, with faults injected if asked for."""
