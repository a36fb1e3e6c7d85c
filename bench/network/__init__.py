"""`tiffin bench network`: what remote blocks cost, each number beside the limit of the same run."""
