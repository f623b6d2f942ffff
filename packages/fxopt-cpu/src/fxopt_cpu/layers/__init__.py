"""The layers that passes put into graphs: plain parameters outside, panels and operators inside."""
