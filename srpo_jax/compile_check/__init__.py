"""Compiles a recipe's update and engine for devices that are not there."""
