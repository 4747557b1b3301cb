"""A RAM pool that the engines of one user on one machine share, without a server process."""
