"""What transports are made of: both sides, answers, and the bases that authors build on."""
