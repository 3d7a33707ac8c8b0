"""Every "faster" of the project, side by side with its peers in one run."""
