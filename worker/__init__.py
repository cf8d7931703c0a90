"""The worker side: the process that runs one rank of one stage, its model runner, and the channels between stages."""
