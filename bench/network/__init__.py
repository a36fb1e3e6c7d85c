"""`tiffin bench network`: costs of remote blocks, each number beside the limit of the same run."""
