"""How far a calibration and the simulator's numbers can be believed, measured on shipped data."""
